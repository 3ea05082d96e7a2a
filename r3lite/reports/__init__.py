"""Reports: what run folders hold, as charts and tables of one HTML page. Knows files and numbers; computes no score."""
