"""Console: web pages that show what wants an operator's attention, and let the operator act.

    browser ──HTTP──▶ doors ──▶ views ──▶ link ──STOMP──▶ broker
                                  │ answers
                                  ▼
                                pages (pure) ──▶ templates, JSON

The console is an ordinary client in a process of its own: it does nothing that a client with the same user could not
do. Each login is a connection of that user. `doors` decides which requests are let in, `views` asks the broker, and
`pages` makes the data of each page from the answers, without I/O.
"""
