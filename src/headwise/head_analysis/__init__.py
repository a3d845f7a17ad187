"""What every head does: measures, classes, importance, redundancy."""
