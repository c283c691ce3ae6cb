"""How far two implementations are apart, layer by layer."""
