"""A report of runs: one HTML file that needs nothing else. See docs/report.md."""
