"""Deletes, one at a time, what orders copies and keeps memory alive, and checks that somebody notices."""
