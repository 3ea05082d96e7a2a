"""Questions, trajectories and the sample world: what is read from files and made into rows."""
