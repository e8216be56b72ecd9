"""What a user calls: the operators, their checks, and the reference that they are held against."""
