"""Measuring drafters."""
