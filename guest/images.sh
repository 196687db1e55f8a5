# Sourced by image.sh: what firn's own images hold. An image is its layer below (`from`), Debian packages, and wheels that pip installs.
# shellcheck shell=bash disable=SC2034  # they are image.sh's

# image_contents NAME: sets `from`, `packages`, `wheels` and `runtime_wheels` to what the image NAME holds; fails where firn has no such image.
image_contents() {
    from='' packages=() wheels=() runtime_wheels=()
    case $1 in
        base)
            # The runtime interface client is linked with libstdc++6, and its wheel cannot say so.
            packages=(python3 python3-pyaes python3-chameleon python3-jinja2 libstdc++6)
            # AWS Lambda's own runtime interface client, and what carries its SnapStart hooks. They lie where AWS Lambda has them.
            runtime_wheels=(awslambdaric snapshot-restore-py)
            ;;
        science)
            from=base
            packages=(python3-numpy python3-pil python3-igraph libopenblas0-pthread)
            ;;
        learning)
            from=science
            packages=(python3-torch python3-torchvision python3-sklearn)
            ;;
        media)
            from=science
            packages=(ffmpeg)
            # Debian's OpenCV needs VTK, GDAL and Qt: 700 MB more. This is the last one built for Debian's numpy.
            wheels=(opencv-python-headless==4.8.1.78)
            ;;
        *) return 1 ;;
    esac
}

# Packages that no function needs, though others ask for them: what installs packages and what only users and desktops need. apt is told that they
# are installed. Nothing is in here that a program is linked with, but for drivers that are loaded where there is a graphics card.
unneeded=(
    adduser ca-certificates debconf dpkg fontconfig-config iso-codes lsb-base mailcap mime-support openssl passwd perl perl-base procps shared-mime-info
    sysvinit-utils tar ucf
    gdal-data gdal-plugins libgl1-mesa-dri libllvm15 libwacom-common mariadb-common mysql-common proj-data x11-common xkb-data
    libtorch-test python3-hypothesis python3-lib2to3 python3-pythran python3-sympy
)
