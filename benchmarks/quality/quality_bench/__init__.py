"""Cases from real data, methods of attribution, and a runner that judges every method on every case's bank."""
