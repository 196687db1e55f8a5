use std::fs;

use super::{Available, dependencies, module_name};

#[test]
fn names_have_no_folder_ending_or_hyphen() {
    assert_eq!(module_name("kernel/drivers/virtio-blk.ko.xz").unwrap(), "virtio_blk");
    assert_eq!(module_name("erofs.ko").unwrap(), "erofs");
    assert_eq!(module_name("modules.dep"), None);
    assert_eq!(module_name("a.ko.sig"), None);
}

#[test]
fn dependencies_are_read_from_the_modules_strings() {
    let module = b"\x7fELF\0license=GPL\0depends=virtio,virtio-ring\0name=x\0";
    assert_eq!(dependencies(module), ["virtio", "virtio_ring"]);
    assert!(dependencies(b"\0depends=\0softdepends=a\0").is_empty());
}

#[test]
fn modules_are_found_in_all_folders() {
    let kernel = tempfile::tempdir().unwrap();
    let modules = kernel.path().join("lib/modules/6.12");
    fs::create_dir_all(modules.join("kernel/fs")).unwrap();
    fs::write(modules.join("kernel/fs/erofs.ko.xz"), "").unwrap();
    fs::write(modules.join("modules.builtin"), "kernel/drivers/virtio/virtio-pci.ko\n").unwrap();
    let available = Available::read(kernel.path()).unwrap();
    assert_eq!(available.files.keys().collect::<Vec<_>>(), ["erofs"]);
    assert!(available.built_in.contains("virtio_pci"));
}
