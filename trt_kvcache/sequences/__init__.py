"""What one slot holds, kept elsewhere: sequence handles, the prompt cache, snapshots."""
