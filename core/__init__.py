"""What every part of Baton agrees on. Imports the standard library only."""
