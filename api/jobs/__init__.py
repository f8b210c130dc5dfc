"""What profiles, trainings and evaluations share: state, events, cancelling, resuming."""
