"""Branches that span several devices."""
