//! What is particular to x86-64: the memory map, ACPI tables, CPUID and boot registers.

pub(crate) mod acpi;
pub(crate) mod boot_regs;
pub(crate) mod cpu_model;
pub(crate) mod cpuid;
pub(crate) mod layout;
