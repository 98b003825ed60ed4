"""The page of one run or of several: what `parallel3d report RUN --html` writes.

page_data.py   from the files of runs to charts, figures and events as plain data. Pure
scales.py      ticks, and curves of at most some hundred points. Pure
svg_chart.py   a chart as inline SVG
html_page.py   the page, with its data as JSON, page.css and page.js
"""
