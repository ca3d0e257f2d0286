"""The laboratory's report: a measurement and its numbers as one self-contained page."""

from .write import write_report

__all__ = ["write_report"]
