"""What a stage asks for besides its message: a connection, a client, whatever a factory makes."""
