"""Coordinators and fan-out workers over HTTP: health, metrics, status, and typing in channels."""
