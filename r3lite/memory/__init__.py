"""The memory planner: what a run will hold on its device, and the settings that make it fit."""
