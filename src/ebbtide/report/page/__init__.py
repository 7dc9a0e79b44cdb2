"""report.html: a run's folder as one page, written or served. Imports no torch."""
