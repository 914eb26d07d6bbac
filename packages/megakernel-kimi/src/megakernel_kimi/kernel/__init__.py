"""The decode kernel: a whole step of Kimi K3 in one Pallas call, and the commit of its state."""
