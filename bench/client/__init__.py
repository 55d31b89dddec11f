"""How fast is truenext's own client? `python -m bench.client`"""
