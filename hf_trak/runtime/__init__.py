"""Processes, threads, transfers between devices, progress, and interruption."""
