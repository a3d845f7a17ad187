"""Helpers of several test files: specs, models and data to test with, checks, and processes of
several ranks.
"""
