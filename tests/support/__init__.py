"""Models, data and checks that several test files use."""
