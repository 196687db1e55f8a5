// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The kernel function that SnapBPF's prefetch calls from a BPF program (SnapBPF 3.1): it reads a
 * range of a file into the page cache.
 *
 * A program runs where the kernel adds a page to the page cache, and the read-ahead may sleep, so
 * the function only queues the range and a worker reads it. The queue is ordered: the ranges are
 * read in the order in which the program issues them.
 */
#include <linux/bpf.h>
#include <linux/btf.h>
#include <linux/btf_ids.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

/* Pages of one request: more would hold the locks of the page cache for long. */
#define PAGES_AT_ONCE 512UL

struct page_range {
	struct work_struct work;
	struct inode *inode;
	pgoff_t first;
	unsigned long pages;
};

static struct workqueue_struct *queue;

static void read_range(struct work_struct *work)
{
	struct page_range *range = container_of(work, struct page_range, work);
	struct address_space *mapping = range->inode->i_mapping;
	struct file_ra_state state = {};

	file_ra_state_init(&state, mapping);
	while (range->pages) {
		unsigned long pages = min(range->pages, PAGES_AT_ONCE);
		DEFINE_READAHEAD(readahead, NULL, &state, mapping, range->first);

		page_cache_ra_unbounded(&readahead, pages, 0);
		range->first += pages;
		range->pages -= pages;
		cond_resched();
	}
	iput(range->inode);
	kfree(range);
}

__bpf_kfunc_start_defs();

/*
 * Queues the range of `pages` pages from the page `first` on. Returns 0, -EINVAL for a range beyond
 * the file's end, and -ENOMEM.
 */
__bpf_kfunc int snapbpf_prefetch(struct address_space *mapping, u64 first, u64 pages)
{
	u64 all = DIV_ROUND_UP(i_size_read(mapping->host), PAGE_SIZE);
	struct page_range *range;

	if (first >= all || pages > all - first)
		return -EINVAL;
	range = kmalloc(sizeof(*range), GFP_ATOMIC | __GFP_NOWARN);
	if (!range)
		return -ENOMEM;
	range->inode = igrab(mapping->host);
	if (!range->inode) {
		kfree(range);
		return -EINVAL;
	}
	range->first = first;
	range->pages = pages;
	INIT_WORK(&range->work, read_range);
	queue_work(queue, &range->work);
	return 0;
}

__bpf_kfunc_end_defs();

BTF_KFUNCS_START(functions)
BTF_ID_FLAGS(func, snapbpf_prefetch)
BTF_KFUNCS_END(functions)

static const struct btf_kfunc_id_set set = {
	.owner = THIS_MODULE,
	.set = &functions,
};

static int __init start(void)
{
	int error;

	queue = alloc_ordered_workqueue("snapbpf", 0);
	if (!queue)
		return -ENOMEM;
	error = register_btf_kfunc_id_set(BPF_PROG_TYPE_TRACING, &set);
	if (error)
		destroy_workqueue(queue);
	return error;
}

static void __exit stop(void)
{
	destroy_workqueue(queue);
}

module_init(start);
module_exit(stop);
MODULE_DESCRIPTION("A kernel function by which BPF programs read ahead");
MODULE_LICENSE("GPL");
