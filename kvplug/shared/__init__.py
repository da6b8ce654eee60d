"""One index for several router processes: one of them writes it, the others read it.

folder     a folder of arrays that processes map, and how it goes when they are gone
layout     what is in it, for who needs neither numpy nor kernels
pages      which arrays an index has now, and who is behind the numbers in them
publishing the writer: a Router that follows events; its arrays are in the folder
attached   a reader's indexes: those arrays, never written
peers      the readers tell each other: what ranks are busy with, what was sent where
reading    the reader: a Router that decides by all of it
"""
