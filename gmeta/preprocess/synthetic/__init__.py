"""Generates data to try gmeta on."""
