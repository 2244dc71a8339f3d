"""What every tool's report shares: one HTML page that needs nothing else, plots, provenance.

`page.py` is the page, `plots.py` plots in its colours, `provenance.py` what it was made with.
"""

from outrider.report.page import Page, table
from outrider.report.provenance import document, provenance

__all__ = ["Page", "document", "provenance", "table"]
