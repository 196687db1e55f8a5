# Runs experiments that need a DAX file system, in the lab: `make dax-counts`. The arguments go to
# firn.
set -e
mkdir /scratch/dax
mount -t ext4 -o dax=always /dev/pmem1 /scratch/dax
firn bench paper "$@" --dir /scratch/dax --out /out
