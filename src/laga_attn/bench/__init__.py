"""Measurements: what attention moves, keeps and takes."""
