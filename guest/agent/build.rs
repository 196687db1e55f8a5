//! The agent stays in every guest's memory, and therefore in every snapshot. Without symbols its
//! size is a third.

fn main() {
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
    println!("cargo::rerun-if-changed=build.rs");
}
