"""All SQL, one module per domain: functions with the session first, which flush and never commit."""
