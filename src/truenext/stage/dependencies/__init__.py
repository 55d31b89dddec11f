"""Dependencies of a stage: values such as clients, which factories make for each message."""
