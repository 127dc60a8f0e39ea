"""What several families of the second tier share."""
