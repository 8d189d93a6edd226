/* SPDX-License-Identifier: Apache-2.0
 *
 * runner [NAME]: every kernel of the instruction set NAME, by default the best this CPU can run, against scalar on the
 * same data. One line a case; exit code 1 when any differs, 2 when NAME cannot be run here. */
#include <stdio.h>
#include <string.h>

#include "check.h"

static const cec_table *find(const char *name) {
    for (const cec_table *const *t = cec_tables; *t; t++)
        if (name ? strcmp((*t)->name, name) == 0 : (*t)->usable()) return *t;
    return NULL;
}

int main(int argc, char **argv) {
    suite s = {.scalar = find("scalar"), .tested = find(argc > 1 ? argv[1] : NULL)};
    if (!s.tested || !s.tested->usable()) {
        fprintf(stderr, s.tested ? "this CPU lacks %s\n" : "this build lacks %s\n", argv[1]);
        return 2;
    }
    printf("testing %s\n", s.tested->name);
    linear_cases(&s);
    attention_cases(&s);
    pointwise_cases(&s);
    delta_cases(&s);
    printf("%d of %d cases differ\n", s.failures, s.cases);
    return s.failures > 0;
}
