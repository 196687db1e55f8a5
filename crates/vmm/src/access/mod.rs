//! The guest memory that a vCPU accesses: page tables, operands of an instruction, delivery of an
//! interrupt.
//!
//! Everything here reads what the guest wrote, so nothing is trusted: every walk and every operand
//! is bounded.

mod addresses;
mod operands;
mod page_tables;

pub(crate) use addresses::{
    PhysicalMemory, Registers, accessed_by_delivery, accessed_by_instruction,
    written_by_instruction,
};
pub(crate) use page_tables::{PageTables, WalkEnd};
