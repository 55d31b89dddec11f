"""What goes on around every run of a stage: log fields, figures, spans. One concern a file."""
