"""The mismatch laboratory: measure, attribute, record, replay, report."""
