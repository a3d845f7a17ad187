"""Helpers without knowledge of attention: errors, files, paths, escaping, sizes."""
