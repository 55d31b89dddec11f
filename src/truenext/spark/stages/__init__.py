"""What services of stages wrote down, joined to the broker's history: what contradicts it, and how flows went."""
