# From a monitor's entry in ring 0 to the player in ring 3. The image is at 1 MiB, in memory that the player
# overwrites, because it runs only once. The builder accesses its parts by offset.

.section .boot, "awx"
.code64

# 0: words that the builder fills in.
page_tables:    .quad 0
instruction:    .quad 0
stack:          .quad 0
arguments:      .quad 0, 0

# 0x100: entry of the 64-bit Linux boot protocol: long mode, identity mapping of this page.
.org 0x100
entry:
        leaq boot_stack(%rip), %rsp
        lgdt gdt_pointer(%rip)
        lidt idt_pointer(%rip)
        movq page_tables(%rip), %rax
        movq %rax, %cr3
        movq %cr4, %rax
        orq $0x600, %rax                # SSE: OSFXSR, OSXMMEXCPT
        movq %rax, %cr4
        movq %cr0, %rax
        andq $~0xc, %rax                # EM and TS off
        orq $0x2, %rax                  # MP
        movq %rax, %cr0
        movw $0x40, %ax
        ltr %ax
        movl $0x174, %ecx               # SYSENTER_CS, from which sysexit derives ring 3's selectors
        movl $0x10, %eax
        xorl %edx, %edx
        wrmsr
        pushfq
        popq %rax
        andq $~0x200, %rax              # interrupts off: there are no handlers
        orq $0x3000, %rax               # IOPL 3: ring 3 may use the serial port. KVM with software page tables
                                        # does not keep it, but reads the task state segment
        pushq %rax
        popfq
        movq instruction(%rip), %rdx
        movq stack(%rip), %rcx
        movq arguments(%rip), %rdi
        movq arguments + 8(%rip), %rsi
        # KVM with software page tables emulates ring 0 and supports no other switch to an outer ring. AMD
        # processors do not support sysexit in long mode: it raises #UD, and `refused` continues.
        sysexitq

# 0x200: #UD.
.org 0x200
refused:
        pushq $0x3b
        pushq %rcx
        pushfq
        pushq $0x33
        pushq %rdx
        iretq

# 0x280: entry of the PVH protocol: 32-bit, paging off.
.org 0x280
.code32
pvh_entry:
        movl $boot_stack, %esp
        lgdt gdt_pointer
        movl %cr4, %eax
        orl $0x20, %eax                 # PAE
        movl %eax, %cr4
        movl $low_table, %eax
        movl %eax, %cr3
        movl $0xc0000080, %ecx          # EFER
        rdmsr
        orl $0x100, %eax                # LME
        wrmsr
        movl %cr0, %eax
        orl $0x80000001, %eax           # PG, PE
        movl %eax, %cr0
        ljmp $0x10, $entry
.code64

.org 0x400
gdt:    .quad 0, 0
        .quad 0x00af9b000000ffff        # 0x10: 64-bit code, ring 0
        .quad 0x00cf93000000ffff        # 0x18: data, ring 0
        .quad 0, 0
        .quad 0x00affb000000ffff        # 0x30: 64-bit code, ring 3
        .quad 0x00cff3000000ffff        # 0x38: data, ring 3
        .quad 0x40008900080000e8        # 0x40: the task state segment, at format::TASK_STATE
        .quad 0
gdt_pointer:
        .word gdt_pointer - gdt - 1
        .quad gdt

.org 0x500
idt:    .fill 6 * 2, 8, 0
        .quad 0x00108e0000100200        # 6: an interrupt gate to 0x100200
        .quad 0
idt_pointer:
        .word idt_pointer - idt - 1
        .quad idt

# 0x1000: a copy of the top page table at an address of 32 bits; the builder fills it in.
.org 0x1000
low_table:

.org 0x3000
boot_stack:
