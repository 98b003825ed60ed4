"""The page of one run or of several, and the figures of a run that goes on in the terminal.

page_data.py       from the files of runs to charts, figures and events as plain data. Pure
scales.py          ticks, and curves of at most some hundred points. Pure
svg_chart.py       a chart as inline SVG
timeline_chart.py  the planned pipeline as inline SVG. Pure
html_page.py       the page, with its data as JSON, page.css and page.js
page_file.py       reads the files of runs and writes the page
page_server.py     serves the page of a run to this machine, with live.js
watched_run.py     the newest figures from the lines so far. Pure
terminal_view.py   these figures as lines of a terminal. Pure
"""
