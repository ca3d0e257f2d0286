"""Figures as data, and the one self-contained HTML page that draws them: no network, no library, CSV for each."""
