"""What every part of the library may use and nothing here depends on: files, configs, text, the machine."""
