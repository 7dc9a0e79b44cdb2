"""report.html: a run folder as one HTML page, written or served. Imports no torch."""
