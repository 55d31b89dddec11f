"""How fast are flows of stages? `python -m bench.flows`"""
