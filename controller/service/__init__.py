"""The controller as a service: reports in, tables out, everything kept."""
