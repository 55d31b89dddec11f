"""Flows as data: the body of a message between stages, the events that services record of their executions, and a
picture of each flow made of them. Nothing here runs a stage, or needs Spark or pandas.

    events      records of executions, as services write them into files
    model       executions and flows, made of these records
    drawing     waterfall of a flow, as text and as HTML
    reader      flows of folders with events, read while the files grow, in bounded memory
    search      flows of one trace, found in the files
    envelope    body of a message between stages
"""
