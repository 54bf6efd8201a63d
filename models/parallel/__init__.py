"""One model on several devices, of one process or of several."""
