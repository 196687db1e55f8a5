//! The x86-64 platform: the memory map, ACPI tables, CPUID, and the boot of a Linux kernel.

pub(crate) mod acpi;
pub(crate) mod boot_regs;
pub(crate) mod cpu_features;
pub(crate) mod cpu_model;
pub(crate) mod cpuid;
pub(crate) mod kernel;
pub(crate) mod layout;
pub(crate) mod mp_table;
