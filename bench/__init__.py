"""How fast is truenext, and how does it compare with ActiveMQ on the same machine?"""
