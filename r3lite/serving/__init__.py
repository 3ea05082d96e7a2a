"""The web page and the HTTP API: who may ask what and how much, conversations, the thread that answers."""
