"""Schedules of published kernels, fed to the same simulation, to see how far it can be trusted."""
